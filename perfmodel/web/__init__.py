"""`perfmodel web`: the planner in a browser, on this machine, offline. What a change of a slider passes:

state.py     what an address says: a deployment, its traffic, and what is asked of a view; a command's request of it
views.py     which requests a view's parts make of a state; compare.py: deployments side by side
service.py   where requests are brought: results.py has answers that are there already, and files that were dropped on
             the page; jobs.py lets workers find the others
figures.py   numbers as they are shown, each with its place in a command's JSON; the fields of the form
pictures.py  the same as plots
pages.py     parts and pages of templates
app.py       addresses, and who may ask; it listens
"""

__all__: list[str] = []
