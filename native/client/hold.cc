// Holding pages on NVMe: the entries' extents, a pin word for each segment, one fence, the
// segments' words, and then what the records themselves say.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "base/atomics.h"
#include "base/error.h"
#include "base/keep.h"
#include "base/sequence_point.h"
#include "base/start_thread.h"
#include "client/extents.h"
#include "io/io_engine.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"

namespace kvw {

namespace {

constexpr unsigned kHeaderDepth = 32;
constexpr int kWaitMs = 50;
constexpr int kLateWaitMs = 1000;

uint64_t now_ns() { return system_clock().boot_ns(); }

// O_DIRECT where the filesystem has it, for a header is read once and the page cache is others'.
Fd open_segment(int directory, uint32_t segment, bool& direct) {
  char name[16];
  std::snprintf(name, sizeof name, "%08u.seg", segment);
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW;
  Fd fd(::openat(directory, name, kFlags | O_DIRECT));
  direct = fd.valid();
  if (!fd.valid() && errno == EINVAL) fd = Fd(::openat(directory, name, kFlags));
  return fd;
}

// The reads of headers under way, and the memory that they write to.
struct HeaderReads {
  HeaderReads(unsigned depth, uint64_t bytes)
      : bytes_each(bytes), memory(bytes * depth), engine(make_io_engine("auto", depth)) {}
  uint64_t bytes_each;
  nvme::AlignedBuffer memory;  // outlives the engine
  std::unique_ptr<IoEngine> engine;
};

// A hold of which the disk has not answered every read.
struct LateHold {
  std::unique_ptr<Extents> extents;
  std::unique_ptr<HeaderReads> reads;  // goes first
};

// Ends it when they have ended, in a thread of its own; without one it stays for as long as the
// process lives.
void end_later(std::unique_ptr<LateHold> hold) {
  auto* late = hold.release();
  try {
    start_thread("kvw-late-hold", [late] {
      std::vector<IoDone> done;
      for (IoEngine& engine = *late->reads->engine; engine.in_flight() > 0; done.clear())
        engine.wait(done, kLateWaitMs);
      delete late;
    }).detach();
  } catch (const std::system_error&) {
    keep_forever(std::unique_ptr<LateHold>(late));
  }
}

}  // namespace

// One hold in progress.
class HoldCall {
 public:
  HoldCall(const Client::Open& call, Prompt& prompt, Extents& into, size_t first)
      : call_(call), prompt_(prompt), into_(into), first_(first) {}

  // Stores a pin for the segment of each page that is on NVMe, one after another.
  void collect(size_t end, const Client::SegmentFolder& folder) {
    const uint64_t epoch = call_.view->clear_epoch(call_.row.ordinal);
    for (size_t page = first_; page < end; ++page) {
      const auto entry = call_.view->index().find(prompt_.key(page));
      if (!entry || entry->space != call_.row.ordinal || entry->clear_epoch < epoch ||
          !entry->in_nvme() || !sound(entry->extent)) {
        into_.ended_ = Reason::missing;
        return;
      }
      const int file = file_of(entry->extent, folder);
      if (file < 0) return;
      const uint64_t header = header_bytes(entry->extent);
      const uint64_t offset = uint64_t{entry->extent.offset_blocks} * kBlockBytes + header +
                              into_.shard_ * call_.row.shape.shard_stride();
      into_.pages_.push_back({*entry, offset, 0, static_cast<uint32_t>(file)});
    }
  }

  // After the fence: pages behind a segment that is being reclaimed are not held.
  void confirm() {
    const auto held = [this](const Extents::Page& page) {
      const Extents::File& file = into_.files_[page.file];
      return call_.view->is_open(file.segment, file.life);
    };
    const auto gone = std::ranges::find_if_not(into_.pages_, held);
    if (gone == into_.pages_.end()) return;
    into_.ended_ = Reason::stale;
    into_.pages_.erase(gone, into_.pages_.end());
  }

  // What reading the headers takes: so many reads at a time, each of the longest header.
  std::unique_ptr<HeaderReads> header_reads() const {
    const size_t depth = std::min<size_t>(into_.pages_.size(), kHeaderDepth);
    uint64_t bytes = 0;
    for (const Extents::Page& page : into_.pages_)
      bytes = std::max(bytes, header_bytes(page.entry.extent));
    return std::make_unique<HeaderReads>(static_cast<unsigned>(depth), bytes);
  }

  // Reads every record's header and keeps the pages to the first that is not what the prompt says.
  // False: the disk does not answer in time, and some reads may still write to their memory.
  bool read_headers(HeaderReads& reads, uint64_t deadline_ns) {
    const size_t count = into_.pages_.size();
    const unsigned depth = reads.engine->depth();
    const uint64_t bytes = reads.bytes_each;
    const nvme::AlignedBuffer& memory = reads.memory;
    IoEngine* engine = reads.engine.get();
    std::vector<size_t> free, page_in(depth);
    for (unsigned place = 0; place < depth; ++place) free.push_back(place);
    std::vector<IoDone> done;
    size_t next = 0, good = count;
    while (engine->in_flight() > 0 || next < good) {
      while (next < good && !free.empty() && now_ns() < deadline_ns) {
        const size_t place = free.back();
        free.pop_back();
        page_in[place] = next;
        engine->submit(header_read(next++, memory.data() + place * bytes, place));
      }
      if (next < good && now_ns() >= deadline_ns) {
        into_.ended_ = Reason::timeout;
        good = next;
      }
      if (engine->in_flight() == 0) break;
      done.clear();
      engine->wait(done, now_ns() < deadline_ns ? kWaitMs : 0);
      if (done.empty() && now_ns() >= deadline_ns) return false;
      for (const IoDone& each : done) {
        const size_t page = page_in[each.user];
        const auto header = memory.part(each.user * bytes, header_of(page));
        const bool read = each.result == static_cast<int64_t>(header.size());
        free.push_back(each.user);
        if (page >= good || (read && accept(page, header))) continue;
        into_.ended_ = read ? Reason::mismatch : Reason::io_error;
        good = page;
      }
    }
    into_.pages_.erase(into_.pages_.begin() + static_cast<ptrdiff_t>(good), into_.pages_.end());
    return true;
  }

 private:
  uint64_t payload_blocks() const { return call_.row.shape.slot_bytes() / kBlockBytes; }
  uint64_t header_bytes(const nvme::Extent& extent) const {
    return (extent.blocks - payload_blocks()) * kBlockBytes;
  }
  uint64_t header_of(size_t page) const { return header_bytes(into_.pages_[page].entry.extent); }
  // An index that a writer of the domain damaged names sizes that no record has.
  bool sound(const nvme::Extent& extent) const {
    return extent.blocks > payload_blocks() && header_bytes(extent) <= nvme::kMaxHeaderBytes;
  }

  int file_of(const nvme::Extent& extent, const Client::SegmentFolder& folder) {
    for (size_t at = 0; at < into_.files_.size(); ++at)
      if (into_.files_[at].segment == extent.segment)
        return into_.files_[at].life == extent.life ? static_cast<int>(at) : refuse(Reason::stale);
    if (into_.segments_held_->fetch_add(1) >= folder.segments_held) {
      --*into_.segments_held_;
      return refuse(Reason::later);
    }
    const int pin = into_.session_->take_pin();
    bool direct = false;
    Fd fd = pin < 0 ? Fd() : open_segment(folder.directory.get(), extent.segment, direct);
    if (!fd.valid()) {
      if (pin >= 0) into_.session_->drop_pin(pin);
      --*into_.segments_held_;
      return refuse(pin < 0 ? Reason::later : Reason::io_error);
    }
    into_.session_->store_pin(pin, segment_pin(extent.segment, extent.life));
    into_.files_.push_back({extent.segment, extent.life, ParentFd(fd.release()), direct, pin});
    return static_cast<int>(into_.files_.size() - 1);
  }
  int refuse(Reason reason) {
    into_.ended_ = reason;
    return -1;
  }

  IoOp header_read(size_t page, std::byte* to, size_t place) const {
    const Extents::Page& of = into_.pages_[page];
    return {IoKind::read,
            into_.files_[of.file].descriptor.get(),
            uint64_t{of.entry.extent.offset_blocks} * kBlockBytes,
            {iovec{to, header_of(page)}},
            place};
  }

  bool accept(size_t at, std::span<const std::byte> bytes) {
    Extents::Page& page = into_.pages_[at];
    const auto header = nvme::decode_record_header(bytes);
    if (!header || header->warehouse != call_.view->control().warehouse_id ||
        header->extent != page.entry.extent || header->header_blocks * kBlockBytes != bytes.size())
      return false;
    const PageFacts& facts = header->facts;
    const NamespaceShape& shape = call_.row.shape;
    const auto witness = prompt_.witness(first_ + at);
    const bool same =
        facts.key == prompt_.key(first_ + at) && facts.parent == prompt_.parent(first_ + at) &&
        facts.position == prompt_.position(first_ + at) && facts.namespace_id == shape.id &&
        facts.shards == shape.shards && facts.shard_bytes == shape.shard_bytes &&
        facts.witness_kind == prompt_.witness_kind() && std::ranges::equal(facts.witness, witness);
    if (same) page.digest = facts.digests[into_.shard_];
    return same;
  }

  const Client::Open& call_;
  Prompt& prompt_;
  Extents& into_;
  size_t first_;
};

std::shared_ptr<const Client::SegmentFolder> Client::folder(uint64_t deadline_ns) {
  {
    const std::lock_guard state(state_mutex_);
    if (folder_ != nullptr || !locates_) return folder_;
  }
  Writer message(MessageType::locate);
  Connection::Reply reply = ask(message, MessageType::located, deadline_ns);
  Reader body = reply.body();
  const auto* located = body.take<Located>();
  if (located == nullptr || reply.descriptors.size() != 1)
    throw Error(ErrorKind::transport, "daemon_gone", "the daemon's answer is malformed");
  auto made = std::make_shared<SegmentFolder>();
  made->directory = std::move(reply.descriptors.front());
  made->segments_held = located->segments_held;
  const std::lock_guard state(state_mutex_);
  folder_ = std::move(made);
  return folder_;
}

std::string Client::segments(uint64_t timeout_ns) try {
  const auto from = folder(now_ns() + timeout_ns);
  if (from == nullptr) return {};
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(from->directory.get());
} catch (const Error& error) {
  if (error.kind() != ErrorKind::transport) throw;
  return {};
}

std::unique_ptr<Extents> Client::hold(const Key& namespace_id, Prompt& prompt, size_t first,
                                      size_t pages, uint32_t shard, uint64_t timeout_ns) {
  const uint64_t deadline_ns = now_ns() + timeout_ns;
  const Open call = open(namespace_id, prompt, false, deadline_ns);
  if (shard >= call.row.shape.shards)
    throw Error(ErrorKind::usage, "bad_shard",
                "shard is " + std::to_string(shard) + ", this namespace has " +
                    std::to_string(call.row.shape.shards));
  const auto nothing = [&] {
    return std::make_unique<Extents>(call.view, call.session, call.row, shard, segments_held_);
  };
  auto extents = nothing();
  std::shared_ptr<const SegmentFolder> from;
  try {
    from = folder(deadline_ns);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::transport) throw;
  }
  HoldCall holding(call, prompt, *extents, first);
  if (from == nullptr) {
    extents->ended_ = Reason::unreachable;
    return extents;
  }
  holding.collect(std::min(prompt.pages(), first + pages), *from);
  KVW_SEQUENCE_POINT("hold: stored");
  full_fence();
  holding.confirm();
  call.session->count(Counter::loads);
  if (extents->pages_.empty()) return extents;
  auto reads = holding.header_reads();
  if (holding.read_headers(*reads, deadline_ns)) return extents;
  auto late = std::make_unique<LateHold>();
  late->extents = std::move(extents);
  late->reads = std::move(reads);
  end_later(std::move(late));
  extents = nothing();
  extents->ended_ = Reason::timeout;
  return extents;
}

}  // namespace kvw
