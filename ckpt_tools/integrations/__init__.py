"""Our saves and resumes in the trainers that people use: one file per host, translation only.

Each file imports its host when it is used, so none is needed to import this package.
"""
