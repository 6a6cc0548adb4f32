"""Tools around training: to launch, watch, diagnose, plan, simulate and emulate it. Training imports none of them.

commands     the command line
launchers    the launcher of a process, and the addresses of the other processes
processes    processes here and over ssh
planning     the costs of all strategies' settings on given links and machines
timing       models of a step's time
simulate     the strategies' protocols on a virtual clock
diagnosis    where the time of a job went
emulation    emulated compute of slower machines
testing      clusters and networks for tests
ray          workers of Ray Train as ranks
"""
