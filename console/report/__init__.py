"""Finished or running runs on one page: `report.html`, without scripts and without a network.

curve_charts  Charts of figures over batches: a line for each figure, and for each run where there
              are some
curves        Figures of a run by batch, read from `metrics.jsonl` line by line
drawing       Lines, bands, bars and spans as SVG paths in a frame with ticks: arithmetic alone
model_card    The model card of a trained model: its `README.md`, as the Hugging Face hub shows it
record        A run read from the files of its folder, as its report shows it
run_charts    Charts of one run each: lives of its actors, spread of ratios and lags, the learner's
              time
sections      Sections of a report: charts under a heading, with their numbers as tables
write         `report.html`: the template filled with runs, one file that needs nothing else
"""
