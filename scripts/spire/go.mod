module carrel/spire

go 1.25.3

require github.com/spiffe/spire v1.13.3
