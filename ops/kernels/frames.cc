#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "blake2b.h"
#include "checks.h"
#include "hop_tf_kernels.h"

namespace hop_tf {
namespace {

constexpr int kHashedAtOnce = 64;  // Blocks.
constexpr int64_t kReadAtOnce = 1 << 17;  // Bytes. On a slow link, waking up for each packet costs too much.

int64_t EndOf(const HopTfFrame& frame) { return frame.start_bytes + frame.payload_bytes + frame.checksum_bytes; }

// The parts of a frame that are missing. Returns how many there are.
int Missing(const HopTfFrame& frame, iovec* pieces) {
  const iovec parts[] = {
      {frame.start, static_cast<size_t>(frame.start_bytes)},
      {frame.payload, static_cast<size_t>(frame.payload_bytes)},
      {frame.checksum, static_cast<size_t>(frame.checksum_bytes)},
  };
  int num_pieces = 0;
  size_t num_read = static_cast<size_t>(frame.num_read);
  for (const iovec& part : parts) {
    const size_t skipped = std::min(num_read, part.iov_len);
    num_read -= skipped;
    if (skipped == part.iov_len) continue;
    pieces[num_pieces++] = {static_cast<uint8_t*>(part.iov_base) + skipped, part.iov_len - skipped};
  }
  return num_pieces;
}

bool BeginsAsExpected(const HopTfFrame& frame) {
  const size_t num_bytes = static_cast<size_t>(std::min<int64_t>(frame.num_read, frame.start_bytes));
  const auto is_alike = [&](const uint8_t* start) { return std::memcmp(frame.start, start, num_bytes) == 0; };
  return is_alike(frame.starts[0]) || is_alike(frame.starts[1]);
}

bool HasRightChecksum(const HopTfFrame& frame) {
  if (frame.checksum_bytes == 0) return true;
  Blake2b hash(frame.key);
  uint8_t bytes[8];
  const auto add_number = [&](uint64_t number) {
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(number >> (8 * i));
    hash.Add(bytes, 8);
  };
  add_number(static_cast<uint64_t>(frame.number));
  hash.Add(frame.start, static_cast<size_t>(frame.start_bytes));
  const int64_t num_blocks = frame.payload_bytes / HOP_TF_HASH_BLOCK_BYTES;
  uint64_t digests[kHashedAtOnce];
  for (int64_t begin = 0; begin < num_blocks; begin += kHashedAtOnce) {
    const int64_t count = std::min<int64_t>(kHashedAtOnce, num_blocks - begin);
    HopTfBlockHash(frame.payload + begin * HOP_TF_HASH_BLOCK_BYTES, count, frame.block_key, digests);
    std::for_each(digests, digests + count, add_number);
  }
  const int64_t num_hashed = num_blocks * HOP_TF_HASH_BLOCK_BYTES;
  hash.Add(frame.payload + num_hashed, static_cast<size_t>(frame.payload_bytes - num_hashed));
  hash.Finish(bytes);
  return std::memcmp(bytes, frame.checksum, Blake2b::kDigestBytes) == 0;
}

// Reads what is there of a frame. Returns whether anything was.
bool Read(HopTfFrame* frame) {
  bool has_read = false;
  while (frame->state == HOP_TF_AWAITED) {
    iovec pieces[3];
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<size_t>(Missing(*frame, pieces));
    const ssize_t count = recvmsg(frame->socket, &message, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return has_read;
    if (count <= 0) {
      frame->state = HOP_TF_ENDED;
      return true;
    }
    has_read = true;
    frame->num_read += count;
    if (!BeginsAsExpected(*frame)) {
      frame->state = HOP_TF_OTHER;
    } else if (frame->num_read == EndOf(*frame)) {
      frame->state = HasRightChecksum(*frame) ? HOP_TF_COMPLETE : HOP_TF_CORRUPT;
    }
  }
  return has_read;
}

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

int64_t WatermarkOf(const HopTfFrame& frame) {
  if (frame.state != HOP_TF_AWAITED || frame.num_read < frame.start_bytes) return 1;
  return std::min(EndOf(frame) - frame.num_read, kReadAtOnce);
}

bool IsValid(const HopTfFrame& frame) {
  return frame.start_bytes > 0 && frame.payload_bytes >= 0 && frame.num_read >= 0 &&
         (frame.checksum_bytes == 0 || frame.checksum_bytes == Blake2b::kDigestBytes);
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfReceiveFrames(HopTfFrame* frames, int64_t num_frames, int idle_ms, int total_ms) {
  if (!IsSize(num_frames)) return HOP_TF_INVALID_ARGUMENT;
  if (!std::all_of(frames, frames + num_frames, IsValid)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(total_ms);
    std::vector<pollfd> awaited(static_cast<size_t>(num_frames));
    std::vector<Watermark> watermarks(static_cast<size_t>(num_frames));
    const auto can_go_on = [&] {
      size_t num_awaited = 0;
      for (int64_t i = 0; i < num_frames; ++i) {
        Read(&frames[i]);
        if (frames[i].state > HOP_TF_COMPLETE) return false;
        watermarks[i].Set(frames[i].socket, WatermarkOf(frames[i]));
        if (frames[i].state == HOP_TF_AWAITED) awaited[num_awaited++] = {frames[i].socket, POLLIN, 0};
      }
      if (num_awaited == 0 || Clock::now() >= end) return false;
      const int num_ready = poll(awaited.data(), num_awaited, idle_ms);
      return num_ready > 0 || (num_ready < 0 && errno == EINTR);
    };
    while (can_go_on()) {
    }
    for (int64_t i = 0; i < num_frames; ++i) watermarks[i].Set(frames[i].socket, 1);
  });
}
