"""What pages are made of: names and units of numbers, charts as SVG, styles, the frame of a page."""
