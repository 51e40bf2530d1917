"""What became of requests and steps: records, their summary, its interval."""
