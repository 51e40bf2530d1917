"""Command lines of servers and load tests as scenarios, and engines as command lines again: parsed, never executed.

description.py  what the flags of a command mean: a file of hardware_specs/engines/commands
shell.py        the commands of a script; manifests.py: those of containers
finding.py      which of them starts a server or a load test, and what is around it
arguments.py    the flags among a command's words
server.py       what they say of a scenario, one by one and together, and an engine as flags again; load.py: of traffic
line.py         all of it: from text to a scenario and its file, with comments
"""
