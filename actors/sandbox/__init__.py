"""Sandbox for programs that a model wrote.

entry         Process in the sandbox: gives up what it does not need, then runs a program
kernel        System calls that Python has no function for, on Linux and x86_64
remote_calls  Tests that call a program, each in a process of its own: plain data crosses, and
              nothing else
sandbox       Programs of a model, run where they can compute and do nothing else
"""
