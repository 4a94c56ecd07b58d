"""Sandbox for programs that a model wrote.

entry         Process in the sandbox: gives up the rights that it does not need, then runs a program
kernel        System calls that Python has no function for, on Linux and x86_64
remote_calls  Tests that call a program, each in a process of its own: only plain data crosses
sandbox       Programs of a model, run in a process that can compute and nothing else
"""
