// The kernel says that this process runs the bundle's loader; children are to be started by the bundle's wrapper.
process.execPath = require("node:path").join(__dirname, "..", "bin", "node");
