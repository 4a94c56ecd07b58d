"""Paths of a version to its actors: from whom each of them pulls it.

pull_tree      Tree of pulls, so that a version leaves the publisher a few times and not once per
               actor
sites          Sites: places whose actors fetch each version once over the link between them and the
               publisher
slice_digests  Digests of the slices of a version, by which those that pull from others check each
               one
"""
