"""Command lines of servers and load tests to scenarios, and engines back to command lines; nothing is executed.

description.py  meaning of a command's flags: a file of hardware_specs/engines/commands
shell.py        commands of a script; manifests.py: of containers
finding.py      which of them start a server or a load test
arguments.py    flags among a command's words
server.py       flags to engine fields and back; load.py: flags to traffic
line.py         from text to a scenario and its commented file"""
