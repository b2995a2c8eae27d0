"""Files of the checkout: compiled, read from the docs, shown in a browser, and searched for waits."""
