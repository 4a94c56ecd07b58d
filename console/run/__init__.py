"""Processes of a run: plan, start, watch, restart.

actor_watch    Watch of a run's store: live actors, why none samples, release of dead local actors'
               leases
card_memory    Memory of the learner on one card, computed from settings and the model's
               `config.json`
checks/        Checks of settings and machine before a run starts, one file for each thing that is
               checked
decoder_sizes  Sizes of a decoder by its `config.json`: parameters, bytes kept of each token
fork_process   Fork server of `nyala up`: imports the libraries of learner and actors once, then
               forks them
fork_server    The fork server as `nyala up` sees it: which process can be a fork, and how to ask
               for one
init_model     The model that a run begins with if `run.model` is `init`: made, kept, replaced when
               it differs
plan           Plan of a run: cards, environment and command of each process, and the files that
               they read
preflight      Checks of `nyala up` before it starts anything: each raises one sentence, or passes
process        One process of a run, as its parent sees it: command, log, process group, start, end
process_guard  A guard process that ends what a killed command had started, then ends itself
redis_server   The Redis server that `nyala up` starts: binary, configuration, address, password,
               data folder
run_folder     The folder of a run: files, state, settings, versions, a lock for one `nyala up` at a
               time
supervisor     Supervisor of the processes of a run: started at once, restarted on failure, stopped
               in order
user_files     Files of the user in the settings of a run: made absolute when it is created, then
               kept
"""
