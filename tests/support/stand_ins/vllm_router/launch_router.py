from gpu_stand_in import router

router()
