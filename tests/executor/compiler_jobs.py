"""Jobs for processes that compile, some of which end theirs; without torch, so that they start at once."""

import os
import time


def prepare(note):
    """Of a process that compiles."""
    os.environ["PREPARED"] = note


def compile_one(job):
    """Writes the file that the job names; some jobs end their process, or take too long."""
    path, deed = job
    if deed == "abort":
        os.abort()
    if deed == "hang":
        time.sleep(600)
    path.write_text(os.environ["PREPARED"])
