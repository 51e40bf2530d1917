"""All candidates of a plan in closed form: the space, its demand, steps and queues, errors drawn in common."""
