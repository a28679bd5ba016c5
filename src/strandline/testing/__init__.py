"""Public test doubles and contract suites: manual clock, faulty store, full disk, and the contract of each backend.

The suites (such as :mod:`~strandline.testing.stores`) need ``pytest``; the
doubles need nothing that the package does not.
"""
