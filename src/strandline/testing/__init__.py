"""Public test doubles and contract suites: manual clock, faulty store, full disk, and the contract of each backend.

The suites (:mod:`~strandline.testing.stores`, :mod:`~strandline.testing.cells`) need ``pytest``; the
doubles need nothing that the package does not.
"""
