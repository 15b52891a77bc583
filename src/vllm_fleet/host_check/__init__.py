"""The host check: what was observed on the hosts, judged before anything is changed on them.

Hosts are only observed (`plugins/modules/host_observe.py`, `host_reach.py`); every judgement is here, so that
recorded observations are judged like fresh ones. No I/O.
"""
