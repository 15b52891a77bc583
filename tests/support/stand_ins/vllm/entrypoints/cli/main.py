from gpu_stand_in import engine

engine()
