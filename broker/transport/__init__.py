"""CURVE keys, authentication and ZeroMQ sockets.

allow_list  Allow-list: public keys in `allowed/` and their roles, read again on change, added and
            revoked
enrolled    Keys registered by actors that share an enrolment key; rotation of the keys of a run
keys        CURVE keys of a run: files in one folder, made by `nyala keys` and read by every process
sockets     ZeroMQ sockets of the project, with every option that a default would get wrong;
            endpoints
zap         ZAP authentication of a ZeroMQ context against an allow-list of CURVE public keys
"""
