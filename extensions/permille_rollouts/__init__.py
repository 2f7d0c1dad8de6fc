"""Rollouts: an extension that brings a version to devices wave by wave, with groups, hours and webhooks.

The modules of this folder are decisions without I/O: which device takes a version when, and what the reports
say about it. Each of the folders `service`, `workers` and `agent` is the part of one program.
"""
