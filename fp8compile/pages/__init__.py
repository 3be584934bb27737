"""Pages of HTML that a browser shows without a network: files of this package and data, put into one."""
