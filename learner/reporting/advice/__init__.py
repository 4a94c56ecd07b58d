"""Advice: rules over the evidence of many batches, each one sentence with cause and remedy.

Pure but for `advisor_thread.py`: rules see numbers and settings, never torch, the store or a file.
"""
