"""What each command is asked and what it answers: the command line, the page and Python make the same requests.

    request.py      a request: its flags, the scenario that it is about, the line that anyone would type; its answer
    runs.py         memory, simulate, execute, explain, roofline, compare
    searches.py     whatif, plan, study
    catalog.py      hardware, models, scenarios, techniques; new and schema
    measurements.py calibrate, validate, quality

Nothing here knows a terminal, an exit status or HTTP; modules import what they need when they are asked."""
