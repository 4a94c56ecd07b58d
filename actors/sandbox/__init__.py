"""Sandbox for programs that a model wrote.

entry         Process in the sandbox: gives up the rights that it does not need, then runs a program
kernel        Isolation of a process by the Linux kernel: namespaces, Landlock, a filter of system
              calls
remote_calls  Tests and the program that they call, in two sandboxed processes: only plain data
              crosses
sandbox       Programs of a model, run in a process that can compute and nothing else
"""
