"""Processes of a run: plan, start, watch, restart.

actor_watch    Live-actor count of a run, and immediate release of the leases of a local actor
               that died
card_memory    Memory of the learner on one card, computed from settings and the model's
               `config.json`
checks/        Checks of settings and machine before a run starts
fork_process   Fork server of `nyala up`: imports the libraries of learner and actors once
fork_server    The fork server as `nyala up` sees it: which process can be a fork
init_model     The model that a run begins with when `run.model` is `init`
own_files      Files of the user in the settings of a run
plan           Plan of a run from checked settings: resolved paths, files of the run folder
preflight      Checks of `nyala up` before it starts anything
process        One process that `nyala up` starts: command, log, process group, end
process_guard  A guard process that ends what a killed `nyala up` had started, then ends itself
redis_server   The Redis server of a run: binary, configuration, address
run_folder     The folder of a run: its files, its progress
supervisor     Supervisor of the processes of a run: started at once, restarted on failure
"""
