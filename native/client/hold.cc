// Holding pages on NVMe: the entries' extents, a pin word for each segment, one fence, the
// segments' words, and then what the records themselves say.
#include <unistd.h>

#include <algorithm>
#include <string>
#include <system_error>

#include "base/atomics.h"
#include "base/error.h"
#include "base/keep.h"
#include "base/sequence_point.h"
#include "base/start_thread.h"
#include "client/client.h"
#include "client/extents.h"
#include "io/io_engine.h"
#include "nvme/aligned_buffer.h"
#include "nvme/format.h"

namespace kvw {

namespace {

constexpr unsigned kHeaderDepth = 32;
constexpr int kWaitMs = 50;
constexpr int kLateWaitMs = 1000;

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
  HoldCall(const ClientCall& call, Extents& into, size_t first)
      : call_(call), into_(into), first_(first) {}

  // Stores a pin for the segment of each page that is on NVMe, one after another.
  void collect(size_t end, const SegmentFolder::Opened& folder) {
    for (size_t page = first_; page < end; ++page) {
      const auto entry = call_.find(page);
      if (!entry || !entry->in_nvme() || !sound(entry->extent))
        return into_.end(Reason::missing, into_.pages().size());
      const auto file = into_.pin_segment(entry->extent, folder);
      if (!file) return;
      const uint64_t header = header_bytes(entry->extent);
      const uint64_t offset = uint64_t{entry->extent.offset_blocks} * kBlockBytes + header +
                              into_.shard() * call_.shape().shard_stride();
      into_.add({*entry, offset, 0, *file});
    }
  }

  // After the fence: pages behind a segment that is being reclaimed are not held.
  void confirm() {
    const auto held = [this](const Extents::Page& page) {
      const Extents::File& file = into_.files()[page.file];
      return call_.view().is_open(file.segment, file.life);
    };
    const auto gone = std::ranges::find_if_not(into_.pages(), held);
    if (gone != into_.pages().end())
      into_.end(Reason::stale, static_cast<size_t>(gone - into_.pages().begin()));
  }

  // What reading the headers takes: so many reads at a time, each of the longest header.
  std::unique_ptr<HeaderReads> header_reads() const {
    const size_t depth = std::min<size_t>(into_.pages().size(), kHeaderDepth);
    uint64_t bytes = 0;
    for (const Extents::Page& page : into_.pages())
      bytes = std::max(bytes, header_bytes(page.entry.extent));
    return std::make_unique<HeaderReads>(static_cast<unsigned>(depth), bytes);
  }

  // Reads every record's header and keeps the pages to the first that is not what the prompt says.
  // False: the disk does not answer in time, and some reads may still write to their memory.
  bool read_headers(HeaderReads& reads) {
    const size_t count = into_.pages().size();
    const unsigned depth = reads.engine->depth();
    const uint64_t bytes = reads.bytes_each;
    const nvme::AlignedBuffer& memory = reads.memory;
    IoEngine* engine = reads.engine.get();
    std::vector<size_t> free, page_in(depth);
    for (unsigned place = 0; place < depth; ++place) free.push_back(place);
    std::vector<IoDone> done;
    size_t next = 0, good = count;
    Reason ended = Reason::none;
    while (engine->in_flight() > 0 || next < good) {
      while (next < good && !free.empty() && !call_.late()) {
        const size_t place = free.back();
        free.pop_back();
        page_in[place] = next;
        engine->submit(header_read(next++, memory.data() + place * bytes, place));
      }
      if (next < good && call_.late()) {
        ended = Reason::timeout;
        good = next;
      }
      if (engine->in_flight() == 0) break;
      done.clear();
      engine->wait(done, call_.late() ? 0 : kWaitMs);
      if (done.empty() && call_.late()) return false;
      for (const IoDone& each : done) {
        const size_t page = page_in[each.user];
        const auto header = memory.part(each.user * bytes, header_of(page));
        const bool read = each.result == static_cast<int64_t>(header.size());
        free.push_back(each.user);
        if (page >= good || (read && accept(page, header))) continue;
        ended = read ? Reason::mismatch : Reason::io_error;
        good = page;
      }
    }
    if (good < count) into_.end(ended, good);
    return true;
  }

 private:
  uint64_t payload_blocks() const { return call_.shape().slot_bytes() / kBlockBytes; }
  uint64_t header_bytes(const nvme::Extent& extent) const {
    return (extent.blocks - payload_blocks()) * kBlockBytes;
  }
  uint64_t header_of(size_t page) const { return header_bytes(into_.pages()[page].entry.extent); }
  // An index that a writer of the domain damaged names sizes that no record has.
  bool sound(const nvme::Extent& extent) const {
    return extent.blocks > payload_blocks() && header_bytes(extent) <= nvme::kMaxHeaderBytes;
  }

  IoOp header_read(size_t page, std::byte* to, size_t place) const {
    const Extents::Page& of = into_.pages()[page];
    return {IoKind::read,
            into_.files()[of.file].descriptor.get(),
            uint64_t{of.entry.extent.offset_blocks} * kBlockBytes,
            {iovec{to, header_of(page)}},
            place};
  }

  bool accept(size_t at, std::span<const std::byte> bytes) {
    const Extents::Page& page = into_.pages()[at];
    const auto header = nvme::decode_record_header(bytes);
    if (!header || header->warehouse != call_.view().control().warehouse_id ||
        header->extent != page.entry.extent || header->header_blocks * kBlockBytes != bytes.size())
      return false;
    const PageFacts& facts = header->facts;
    const NamespaceShape& shape = call_.shape();
    const Expected expected = call_.expected(first_ + at);
    const bool same = facts.key == expected.key && facts.parent == expected.parent &&
                      facts.position == expected.position && facts.namespace_id == shape.id &&
                      facts.shards == shape.shards && facts.shard_bytes == shape.shard_bytes &&
                      facts.witness_kind == expected.witness_kind &&
                      std::ranges::equal(facts.witness, expected.witness);
    if (same) into_.set_digest(at, facts.digests[into_.shard()]);
    return same;
  }

  const ClientCall& call_;
  Extents& into_;
  size_t first_;
};

std::string Client::segments(uint64_t timeout_ns) try {
  const auto daemon = link_.attachment();
  const auto* folder = daemon->segments.open(link_, now_ns() + timeout_ns);
  if (folder == nullptr) return {};
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(folder->directory.get());
} catch (const Error& error) {
  if (error.kind() != ErrorKind::transport && error.code() != "closed") throw;
  return {};
}

std::unique_ptr<Extents> Client::hold(const Key& namespace_id, Prompt& prompt, size_t first,
                                      size_t pages, uint32_t shard, uint64_t timeout_ns) {
  const auto call = ClientCall::open(link_, namespace_id, prompt, false, now_ns() + timeout_ns);
  call.check_shard(shard);
  const auto nothing = [&](Reason why) {
    auto made = std::make_unique<Extents>(call.daemon->view, call.daemon->session, call.row, shard);
    made->end(why, 0);
    return made;
  };
  const SegmentFolder::Opened* folder = nullptr;
  try {
    folder = call.daemon->segments.open(link_, call.deadline_ns);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::transport) throw;
  }
  if (folder == nullptr) return nothing(Reason::unreachable);
  auto extents = nothing(Reason::none);
  HoldCall holding(call, *extents, first);
  holding.collect(std::min(prompt.pages(), first + pages), *folder);
  KVW_SEQUENCE_POINT("hold: stored");
  full_fence();
  holding.confirm();
  call.session().count(Counter::loads);
  if (extents->pages().empty()) return extents;
  auto reads = holding.header_reads();
  if (holding.read_headers(*reads)) return extents;
  auto late = std::make_unique<LateHold>();
  late->extents = std::move(extents);
  late->reads = std::move(reads);
  end_later(std::move(late));
  return nothing(Reason::timeout);
}

}  // namespace kvw
