"""Small experiments whose outcomes are known: does tether's training do what the literature says it
does?
"""
