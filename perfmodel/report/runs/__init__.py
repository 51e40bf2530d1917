"""A run, or one step of it: tables, the HTML page, records on disk, the timeline, the roofline."""
