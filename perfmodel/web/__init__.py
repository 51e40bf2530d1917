"""`perfmodel web`: the planner in a browser, on this machine, offline. What a change of a slider passes:

state.py      what an address says: a deployment, its traffic, and what is asked of a view
views         which questions a view's parts ask of a state
questions.py  a question is a command line; what it answers is that command's JSON and document
desk.py       where questions are brought: known.py has answers that are there already, jobs.py lets workers find
              the others; drops.py keeps files that were dropped on the page
figures.py    numbers as they are shown, each with its place in that JSON; pictures: the same as plots
pages.py      parts and pages of templates; fields.py: those of the form; lines.py: a state in other words
app.py        addresses; guard.py: who may ask; server.py listens
"""

__all__: list[str] = []
