"""`perfmodel web`: the planner in a browser, on this machine, offline.

state.py      what an address says: a deployment, its traffic, and what is asked of a view
questions.py  a state as a question that a command answers, and the command's line
known.py      answers that are known already
errands.py       questions that take longer, in a process of their own: progress, stop
drops.py      files that were dropped on the page
figures.py    numbers as they are shown, each with its place in the command's JSON
fields.py     the fields of the form: vLLM's names, what they mean, which values they take
views         one file per view: which questions it asks
pages.py      addresses, pages and parts of pages
guard.py      who may ask: this machine's own pages
server.py     puts them together and listens
"""

__all__: list[str] = []
