"""What is measured: a module with ``run(told, *arguments)`` for each kind of arm (``plan.KINDS``)."""
