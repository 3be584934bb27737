"""The command ``fp8compile``. What parses a command line needs no torch; what runs a command imports it.

main       from the command line to an exit code
commands   the commands: name, options, and the module that runs it
options    the options of each command
values     what an option takes, checked as it is parsed
ends       exit codes, errors as one line
demo, explain, bench    run a command; imported when it runs
recipes    the recipe that a command line describes
"""
