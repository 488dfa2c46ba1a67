// The files of a domain's directory that are the DRAM tier: `lock`, `control`, `arena`, `slots`,
// `index.<incarnation>` and `sessions/`. Opened, created or re-attached here, by the one daemon
// that holds the directory's lock. The arena's and slots' inodes stay for as long as the directory
// does: engines have them mapped, and CUDA registrations point into them.
//
// Threading: constructed and used on the core thread; populate_slab() may run on another thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/types.h"
#include "control/control.h"
#include "index/index.h"
#include "slots/slots.h"

namespace kvw {

struct ArenaOptions {
  std::string directory;
  Key warehouse_id;
  std::span<const std::byte, kSecretBytes> secret;
  uint64_t dram_bytes;
  uint64_t index_entries;  // a power of two
  uint32_t segment_words;  // rows for the NVMe tier's segments
};

// Slabs are the unit of growth and of giving memory to another page size: large enough that a
// page of any usual size fits, small enough that an arena has several.
uint64_t slab_bytes_for(uint64_t dram_bytes);
// Slabs an arena can ever have: room to grow eightfold at a restart without a new file.
uint32_t slab_max_for(uint64_t dram_bytes, uint64_t slab_bytes);
// Throws Error usage ("dram_too_small", "dram_too_large") for a size that no arena can have.
void check_dram(uint64_t dram_bytes);

class Arena {
 public:
  // Locks the directory, opens or creates its files, raises the incarnation, makes a new index.
  // Slabs beyond dram_bytes are given back, with what is in them, where no client is alive.
  // Throws Error: storage "owned" (another daemon, with its pid), "arena_foreign", "arena_larger"
  // (clients have it mapped), errno codes; capacity "arena_too_small".
  explicit Arena(const ArenaOptions& options);
  ~Arena();

  uint32_t slab_count() const { return slab_count_; }
  uint64_t slab_bytes() const { return slots_.header().slab_bytes; }
  uint64_t bytes() const { return slab_count_ * slab_bytes(); }  // of all slabs
  uint64_t incarnation() const { return incarnation_; }
  bool attached() const { return attached_; }  // found pages' files of an earlier daemon
  // What this start gave back. slabs 0: nothing.
  struct Shrunk {
    uint32_t slabs = 0;
    uint64_t pages = 0;
  };
  const Shrunk& shrunk() const { return shrunk_; }

  ControlPage& control() const { return *control_; }
  const Slots& slots() const { return slots_; }
  Index& index() { return index_; }
  std::byte* payload(SlotId slot, const SlabLayout& layout) const {
    return arena_mapping_.data() + slots_.arena_offset(slot, layout);
  }
  std::span<std::byte> slab(uint32_t slab) const {
    return {arena_mapping_.data() + slab * slab_bytes(), slab_bytes()};
  }
  const std::string& directory() const { return directory_; }
  std::string sessions_directory() const { return directory_ + "/sessions"; }

  // Descriptors that hello passes.
  int control_fd() const { return control_read_.get(); }
  int slots_fd() const { return slots_read_.get(); }
  int index_fd() const { return index_read_.get(); }
  int arena_fd() const { return arena_fd_.get(); }
  int arena_read_fd() const { return arena_read_.get(); }

  // Allocates and touches a slab's arena bytes, so that no client ever meets an unbacked page
  // (SIGBUS); in huge pages, where the kernel has some. Blocks for 0.1 to 0.8 s per GiB. Returns 0
  // or an errno. Thread-safe.
  int populate_slab(uint32_t slab);
  // The same for the metadata of a slab's slots from `first` to before `end`, as it is or is about
  // to be cut, and with its first slot for all of its words. 0 or an errno.
  int back_metadata(uint32_t slab, const SlabLayout& layout, uint32_t first, uint32_t end);
  // A file that is shorter than it is mapped here, or of which pages were lost otherwise when they
  // were touched (base/lost_pages.h). Four system calls.
  struct Damage {
    const char* file = nullptr;  // null: there is none
    bool cut = false;
  };
  Damage damage() const;
  // Writes the headers that a new client reads as they were made, where memory has changed since:
  // nobody could connect before the next start. Returns how many had changed.
  int mend_headers();

 private:
  // What stays as it is while this daemon runs, in a mapped file and as it was made.
  struct Header {
    std::byte* mapped;
    std::vector<std::byte> made;
  };

  void lock_directory();
  void open_control(const ArenaOptions& options);
  void open_slots(const ArenaOptions& options);
  void open_arena();
  size_t living_clients() const;
  void give_back();
  void create_index(const ArenaOptions& options);
  void keep_header(const Mapping& mapping, size_t bytes);

  std::string directory_;
  Fd lock_, control_fd_, slots_fd_, index_fd_, arena_fd_;
  Fd control_read_, slots_read_, index_read_, arena_read_;
  Mapping control_mapping_, slots_mapping_, index_mapping_, arena_mapping_;
  ControlPage* control_ = nullptr;
  Slots slots_;
  Index index_;
  uint32_t slab_count_ = 0;
  uint64_t incarnation_ = 0;
  bool attached_ = false;
  Shrunk shrunk_;
  std::vector<Header> headers_;
};

}  // namespace kvw
