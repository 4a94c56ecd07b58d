"""CURVE keys, authentication and ZeroMQ sockets.

allow_list  Allow-list: public keys in `allowed/` and their roles, followed while the process runs
enrolled    Registered keys: pairs that actors made at their start, allowed through an enrolment key
keys        CURVE keys of a run: files in one folder, made by `nyala keys` and read by every process
sockets     ZeroMQ sockets of the project, with every option that a default would get wrong
zap         ZAP authentication of a ZeroMQ context against an allow-list of CURVE public keys
"""
