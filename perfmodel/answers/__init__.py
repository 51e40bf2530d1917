"""What each command answers, by whatever it is asked: the command line and the browser's page print the same.

    answer.py        what an answer is: data, and a document for any renderer
    asked.py         which scenario is asked about: by its name or file, or by flags
    command_lines.py the command that gives an answer again

and a module per command. Nothing here knows a terminal, an exit status or HTTP; modules import what they need when
they are asked.
"""
