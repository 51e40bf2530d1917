"""What a person reads: tables, plots, pages, a timeline, and records on disk. Each room imports those before it only.

    drawing   what each number is called, its unit and its digits (fields.py, metric_labels.py); charts as SVG, one
              style for all figures, the frame of a page
    runs      a run in words and tables (facts.py, tables.py), as curves small enough to draw (series.py, plots.py), as
              one page that is readable without a network (html.py), for Perfetto (timeline.py), as files that can be
              read back even when cut short (records.py); one step and its roofline (step_table.py, roofline.py)
    studies, whatifs, plans   words, tables, pictures and the page of each

Nothing is imported here: a table does not pay for plotly.
"""

__all__: list[str] = []
