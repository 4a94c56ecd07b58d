"""Processes of a run: plan, start, watch, restart.

actor_watch    Live-actor count of a run, and immediate release of the leases of a local actor that
               died
card_memory    Memory of the learner on one card, computed from settings and the model's
               `config.json`
checks/        Checks of settings and machine before a run starts, one file for each thing that is
               checked
fork_process   Fork server of `nyala up`: imports the libraries of learner and actors once, then
               forks them
fork_server    The fork server as `nyala up` sees it: which process can be a fork, and how to ask
               for one
init_model     The model that a run begins with when `run.model` is `init`: made once, then kept
plan           Plan of a run from checked settings: paths, the cards of each process, and its
               commands
preflight      Checks of `nyala up` before it starts anything: each raises one sentence, or passes
process        One process that `nyala up` starts: command, log, process group, end
process_guard  A guard process that ends what a killed command had started, then ends itself
redis_server   The Redis server of a run: binary, configuration, address, password and data folder
run_folder     The folder of a run: its files, its progress, and a lock for one `nyala up` at a time
supervisor     Supervisor of the processes of a run: started at once, restarted on failure, stopped
               in order
user_files     Files of the user in the settings of a run: made absolute when it is created, then
               kept
"""
