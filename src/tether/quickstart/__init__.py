"""The whole pipeline on data that tether brings: demonstrations, prompts, a simulated crowd and a
gold judge.
"""
