"""Many replicas: who gets a request, who watches over it, how KV travels, who comes and goes."""
