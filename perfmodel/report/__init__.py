"""What a person reads: tables, plots, an HTML report, a timeline, and the records on disk.

    fields.py    what each number of the summary is called, its unit and how many digits it deserves
    facts.py     a scenario in words: model, hardware, engine, traffic, targets
    tables.py    rich tables for a terminal
    style.py     colours and the plotly template, one place for all figures
    series.py    records -> curves small enough to draw
    plots.py     figures of a run
    roofline.py  figures of one step: the roofline, its operators, the memory layout
    html.py      one self-contained file, readable without a network
    timeline.py  a trace for Perfetto or chrome://tracing
    records.py   requests.csv, requests.jsonl and steps.csv: written, and read back even when cut short

Nothing is imported here: a table does not pay for plotly.
"""

__all__: list[str] = []
