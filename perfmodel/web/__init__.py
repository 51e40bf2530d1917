"""`perfmodel web`: the planner in a local, offline browser page. Stages of a request:

state.py     an address as a deployment, traffic and view options; requests of a state
views.py     requests of a view's parts; compare.py: deployments side by side
service.py   answers requests: results.py has the cache and uploads, jobs.py the workers
figures.py   displayed numbers with their JSON paths; form fields
pictures.py  plots
pages.py     templates, and a view as a page for any web server
app.py       routes and access control"""

__all__: list[str] = []
