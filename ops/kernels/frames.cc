#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "blake2b.h"
#include "checks.h"
#include "hop_tf_kernels.h"

namespace hop_tf {
namespace {

constexpr int kHashedAtOnce = 64;         // Blocks.
constexpr int64_t kReadAtOnce = 1 << 17;  // Bytes. On a slow link, waking up for each packet costs too much.
constexpr int kMaxPieces = 1000;          // The system takes no more at once.
// When all awaited frames are there: for how long a socket that takes no more is waited for.
constexpr int kGraceMs = 2;

constexpr uint8_t kMagic[] = {'h', 'o', 'p', 'T'};
constexpr uint8_t kHeadVersion = 4;
constexpr uint8_t kMessage = 4;

uint32_t Crc32(const uint8_t* data, size_t num_bytes) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < num_bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

// The head of a message's frame; see `encode_head` in hop_tf/transport/framing.py.
class Head {
 public:
  Head(const HopTfFrame& frame, int64_t payload_bytes, int flags) {
    for (uint8_t byte : kMagic) Put(byte, 1);
    Put(kHeadVersion, 1);
    Put(kMessage, 1);
    Put(static_cast<uint64_t>(flags), 2);
    Put(static_cast<uint64_t>(frame.sequence), 8);
    Put(static_cast<uint64_t>(payload_bytes), 8);
    Put(static_cast<uint64_t>(frame.header_bytes), 4);
    Put(static_cast<uint64_t>(frame.queue_bytes), 2);
    Put(Crc32(bytes_.data(), size_), 4);
  }

  const uint8_t* data() const { return bytes_.data(); }

 private:
  void Put(uint64_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) bytes_[size_++] = static_cast<uint8_t>(value >> (8 * i));
  }

  std::array<uint8_t, HOP_TF_HEAD_BYTES> bytes_;
  size_t size_ = 0;
};

// The checksum of a frame; see hop_tf/transport/checksum.py.
class Checksum {
 public:
  explicit Checksum(const HopTfFrame& frame) : hash_(frame.key), block_key_(frame.block_key) {
    AddNumber(static_cast<uint64_t>(frame.number));
  }

  void AddStart(const uint8_t* start, size_t num_bytes) { hash_.Add(start, num_bytes); }

  void AddPayload(const HopTfPiece& piece) {
    const uint8_t* data = piece.data;
    int64_t num_bytes = piece.num_bytes;
    if (!rest_.empty()) {
      const int64_t num_taken = std::min<int64_t>(num_bytes, kBlockBytes - static_cast<int64_t>(rest_.size()));
      rest_.insert(rest_.end(), data, data + num_taken);
      data += num_taken;
      num_bytes -= num_taken;
      if (static_cast<int64_t>(rest_.size()) < kBlockBytes) return;
      AddBlocks(rest_.data(), 1);
      rest_.clear();
    }
    const int64_t num_blocks = num_bytes / kBlockBytes;
    AddBlocks(data, num_blocks);
    rest_.insert(rest_.end(), data + num_blocks * kBlockBytes, data + num_bytes);
  }

  void Finish(uint8_t* digest) {
    hash_.Add(rest_.data(), rest_.size());
    hash_.Finish(digest);
  }

 private:
  static constexpr int64_t kBlockBytes = HOP_TF_HASH_BLOCK_BYTES;

  void AddNumber(uint64_t number) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(number >> (8 * i));
    hash_.Add(bytes, 8);
  }

  void AddBlocks(const uint8_t* data, int64_t num_blocks) {
    uint64_t digests[kHashedAtOnce];
    for (int64_t begin = 0; begin < num_blocks; begin += kHashedAtOnce) {
      const int64_t count = std::min<int64_t>(kHashedAtOnce, num_blocks - begin);
      HopTfBlockHash(data + begin * kBlockBytes, count, block_key_, digests);
      for (int64_t i = 0; i < count; ++i) AddNumber(digests[i]);
    }
  }

  Blake2b hash_;
  const uint32_t* block_key_;
  std::vector<uint8_t> rest_;
};

// Makes `poll` report a socket only when this many bytes are there. Once a frame has begun as expected, they will come.
class Watermark {
 public:
  void Set(int socket, int64_t num_bytes) {
    if (num_bytes == num_bytes_) return;
    const int value = static_cast<int>(num_bytes_ = num_bytes);
    setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof(value));
  }

 private:
  int64_t num_bytes_ = 1;
};

// A frame on its way.
class Moving {
 public:
  explicit Moving(HopTfFrame* frame)
      : frame_(*frame), start_bytes_(HOP_TF_HEAD_BYTES + frame->queue_bytes + frame->header_bytes) {
    for (int64_t i = 0; i < frame->num_pieces; ++i) payload_bytes_ += frame->payload[i].num_bytes;
    end_ = start_bytes_ + payload_bytes_ + frame->checksum_bytes;
    if (frame->is_outgoing) Begin();
  }

  bool is_begun() const { return frame_.state == HOP_TF_BEGUN; }
  bool is_outgoing() const { return frame_.is_outgoing; }
  bool can_never_be() const { return frame_.state > HOP_TF_COMPLETE; }

  pollfd awaited() const { return {frame_.socket, static_cast<int16_t>(frame_.is_outgoing ? POLLOUT : POLLIN), 0}; }

  // Sends or receives as much as can be at once.
  void GoOn() {
    while (is_begun()) {
      const ssize_t count = frame_.is_outgoing ? Send() : Receive();
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (count <= 0) {
        frame_.state = HOP_TF_ENDED;
        break;
      }
      frame_.num_done += count;
      if (!frame_.is_outgoing && !BeginsAsExpected()) {
        frame_.state = HOP_TF_OTHER;
      } else if (frame_.num_done == end_) {
        frame_.state = frame_.is_outgoing || HasRightChecksum() ? HOP_TF_COMPLETE : HOP_TF_CORRUPT;
      }
    }
    if (!frame_.is_outgoing) watermark_.Set(frame_.socket, NumAwaitedAtOnce());
  }

  void Stop() {
    if (!frame_.is_outgoing) watermark_.Set(frame_.socket, 1);
  }

 private:
  void Begin() {
    const Head head(frame_, payload_bytes_, frame_.flags);
    std::memcpy(frame_.start, head.data(), HOP_TF_HEAD_BYTES);
    std::memcpy(frame_.start + HOP_TF_HEAD_BYTES, frame_.text, static_cast<size_t>(start_bytes_ - HOP_TF_HEAD_BYTES));
    if (frame_.checksum_bytes) ComputeChecksum(frame_.checksum);
  }

  void ComputeChecksum(uint8_t* digest) const {
    Checksum checksum(frame_);
    checksum.AddStart(frame_.start, static_cast<size_t>(start_bytes_));
    for (int64_t i = 0; i < frame_.num_pieces; ++i) checksum.AddPayload(frame_.payload[i]);
    checksum.Finish(digest);
  }

  ssize_t Send() {
    msghdr message = Missing();
    return sendmsg(frame_.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  ssize_t Receive() {
    msghdr message = Missing();
    return recvmsg(frame_.socket, &message, MSG_DONTWAIT);
  }

  // The parts of the frame that have not gone or come.
  msghdr Missing() {
    missing_.clear();
    int64_t num_before = frame_.num_done;
    const auto add = [&](uint8_t* data, int64_t num_bytes) {
      const int64_t num_skipped = std::min(num_before, num_bytes);
      num_before -= num_skipped;
      if (num_skipped == num_bytes || missing_.size() == kMaxPieces) return;
      missing_.push_back({data + num_skipped, static_cast<size_t>(num_bytes - num_skipped)});
    };
    add(frame_.start, start_bytes_);
    for (int64_t i = 0; i < frame_.num_pieces; ++i) add(frame_.payload[i].data, frame_.payload[i].num_bytes);
    add(frame_.checksum, frame_.checksum_bytes);
    msghdr message = {};
    message.msg_iov = missing_.data();
    message.msg_iovlen = missing_.size();
    return message;
  }

  bool BeginsAsExpected() {
    const int64_t num_here = std::min(frame_.num_done, start_bytes_);
    const size_t num_of_head = static_cast<size_t>(std::min<int64_t>(num_here, HOP_TF_HEAD_BYTES));
    const size_t num_of_text = static_cast<size_t>(num_here) - num_of_head;
    if (std::memcmp(frame_.start + HOP_TF_HEAD_BYTES, frame_.text, num_of_text) != 0) return false;
    for (int flags : {frame_.flags, frame_.flags | HOP_TF_ACK_REQUESTED}) {
      const Head head(frame_, payload_bytes_, flags);
      if (std::memcmp(frame_.start, head.data(), num_of_head) != 0) continue;
      if (num_of_head == HOP_TF_HEAD_BYTES) frame_.flags = flags;
      return true;
    }
    return false;
  }

  bool HasRightChecksum() const {
    if (frame_.checksum_bytes == 0) return true;
    uint8_t digest[Blake2b::kDigestBytes];
    ComputeChecksum(digest);
    return std::memcmp(digest, frame_.checksum, Blake2b::kDigestBytes) == 0;
  }

  int64_t NumAwaitedAtOnce() const {
    if (!is_begun() || frame_.num_done < start_bytes_) return 1;
    return std::min(end_ - frame_.num_done, kReadAtOnce);
  }

  HopTfFrame& frame_;
  const int64_t start_bytes_;
  int64_t payload_bytes_ = 0;
  int64_t end_;
  std::vector<iovec> missing_;
  Watermark watermark_;
};

bool IsValid(const HopTfFrame* pointer) {
  const HopTfFrame& frame = *pointer;
  const bool has_sizes = frame.queue_bytes > 0 && frame.header_bytes >= 0 && frame.num_pieces >= 0;
  const auto is_size = [](const HopTfPiece& piece) { return piece.num_bytes >= 0; };
  return has_sizes && (frame.num_done == 0 || (!frame.is_outgoing && frame.num_done > 0)) &&
         std::all_of(frame.payload, frame.payload + frame.num_pieces, is_size) &&
         (frame.checksum_bytes == 0 || frame.checksum_bytes == Blake2b::kDigestBytes);
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfExchangeFrames(HopTfFrame* const* frames, int64_t num_frames, int idle_ms, int total_ms) {
  if (!IsSize(num_frames)) return HOP_TF_INVALID_ARGUMENT;
  if (!std::all_of(frames, frames + num_frames, IsValid)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(total_ms);
    std::vector<Moving> moving;
    moving.reserve(static_cast<size_t>(num_frames));
    for (int64_t i = 0; i < num_frames; ++i) {
      moving.emplace_back(frames[i]);
      if (frames[i]->is_outgoing) moving.back().GoOn();  // The others wait for it.
    }
    const auto is_outgoing = [](const Moving& each) { return each.is_outgoing(); };
    const bool sends = std::any_of(moving.begin(), moving.end(), is_outgoing);
    std::vector<pollfd> sockets;
    const auto can_go_on = [&] {
      sockets.clear();
      bool is_sending = false, awaits = false;
      for (Moving& each : moving) {
        each.GoOn();
        if (each.can_never_be()) return false;
        if (!each.is_begun()) continue;
        (each.is_outgoing() ? is_sending : awaits) = true;
        sockets.push_back(each.awaited());
      }
      if (sockets.empty() || is_sending != sends || Clock::now() >= end) return false;
      const int num_ready = poll(sockets.data(), sockets.size(), awaits ? idle_ms : std::min(idle_ms, kGraceMs));
      return num_ready > 0 || (num_ready < 0 && errno == EINTR);
    };
    while (can_go_on()) {
    }
    for (Moving& each : moving) each.Stop();
  });
}
