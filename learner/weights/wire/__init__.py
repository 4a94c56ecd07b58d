"""The wire form of a model: order and layout of its tensors, and their bytes.

gather  The bytes of a model in its wire form: tensors whole, in one fixed order, in the publish
        dtype
layout  Names, order and places of the tensors of a model in its wire form
probe   The probe: tokens that the policy itself samples, its log-probs of them, and their rounding
"""
