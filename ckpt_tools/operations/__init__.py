"""The operations of the command: one file per verb, and the parts that verbs share."""
