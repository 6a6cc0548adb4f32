"""Tools around training: to launch, watch, diagnose, plan, simulate and emulate it. Training imports none of them.

commands     the command line
launchers    who has started a process, and where the others are
processes    processes here and over ssh
planning     the costs of all strategies' settings on given links and machines
timing       models of a step's time
simulate     the schemes on a virtual clock
diagnosis    where the time of a job went
emulation    slower machines than there are
testing      clusters and networks for tests
ray          workers of Ray Train as ranks
"""
