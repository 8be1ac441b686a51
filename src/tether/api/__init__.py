"""The front door in Python: a function for every method, the runs they leave, and the workbench
below them.
"""
