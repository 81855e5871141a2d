"""Reports for people: a page with charts, and the numbers behind it."""
