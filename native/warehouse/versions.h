// Files that a newer program wrote. They are refused before anything is changed: an older program
// would take them for damaged and write over them. Stateless; blocks for a few small reads.
#pragma once

#include <string>

namespace kvw {

// Looks at the control page, the slots, the segments' headers and the session files whose client
// lives. `nvme_dir` may be empty; what is not there is not looked at.
// Throws Error storage "newer_files" that names the file, both versions and what to do.
void refuse_newer_files(const std::string& arena_dir, const std::string& nvme_dir);

}  // namespace kvw
