"""Which of several equal targets a request goes to: the routers, and the structures that make them quick."""
