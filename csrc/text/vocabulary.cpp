#include "text/vocabulary.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace pelton {
namespace {

constexpr uint32_t kMaxBytes = 0x7fffffff;

bool is_continuation(char byte) { return (static_cast<uint8_t>(byte) & 0xc0) == 0x80; }

// Bytes of the character at the front of a text, 0 where it is none: Unicode's table of well-formed UTF-8.
size_t well_formed(std::string_view text) {
    const auto byte = [text](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
    const uint8_t first = byte(0), second = byte(1);
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4) return 0;
    const uint8_t least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const uint8_t most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    const size_t size = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (second < least || second > most) return 0;
    for (size_t i = 2; i < size; i++)
        if ((byte(i) & 0xc0) != 0x80) return 0;
    return size;
}

bool is_utf8(std::string_view text) {
    while (!text.empty()) {
        const size_t size = well_formed(text);
        if (size == 0) return false;
        text.remove_prefix(size);
    }
    return true;
}

}  // namespace

std::string_view take_string(std::string_view& data) {
    const std::string_view whole = data;
    if (skip_strings(data, 1) == 0) throw std::invalid_argument(" ends too early");
    return whole.substr(sizeof(uint64_t), whole.size() - data.size() - sizeof(uint64_t));
}

size_t skip_strings(std::string_view& data, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint64_t size = 0;
        if (data.size() < sizeof size) return i;
        std::memcpy(&size, data.data(), sizeof size);
        if (size > data.size() - sizeof size) return i;
        data.remove_prefix(sizeof size + size);
    }
    return count;
}

Vocabulary::Vocabulary(EncodedStrings texts) : slots_(std::bit_ceil(2 * texts.count + 1), -1) {
    tokens_.reserve(texts.count);
    texts_.reserve(texts.data.size());
    for (size_t id = 0; id < texts.count; id++) {
        const std::string_view text = take_string(texts.data);
        if (text.size() > kMaxBytes - texts_.size()) throw std::invalid_argument(" are more than 2 GB");
        if (!is_utf8(text)) throw std::invalid_argument("[" + std::to_string(id) + "] is not UTF-8");
        tokens_.push_back(
            {static_cast<uint32_t>(texts_.size()), static_cast<uint32_t>(text.size()) & kMaxBytes, false});
        texts_ += text;
        most_bytes_ = std::max(most_bytes_, text.size());
        if (text.empty()) continue;
        int32_t& slot = slots_[slot_of(text)];
        if (slot >= 0) throw std::invalid_argument(": two tokens have the same text");
        slot = static_cast<int32_t>(id);
    }
}

uint64_t Vocabulary::hash_of(std::string_view text) const {
    uint64_t hash = text.size();
    while (!text.empty()) {
        uint64_t word = 0;
        const size_t count = std::min(text.size(), sizeof word);
        std::memcpy(&word, text.data(), count);
        hash = hash_(hash, word);
        text.remove_prefix(count);
    }
    return hash;
}

// Where a text is in the table, or would be.
size_t Vocabulary::slot_of(std::string_view text) const {
    size_t slot = hash_of(text) & (slots_.size() - 1);
    while (slots_[slot] >= 0 && this->text(slots_[slot]) != text) slot = (slot + 1) & (slots_.size() - 1);
    return slot;
}

int32_t Vocabulary::id_of(std::string_view text) const {
    if (text.size() > most_bytes_) return -1;
    const int32_t id = slots_[slot_of(text)];
    return id >= 0 && !tokens_[static_cast<size_t>(id)].is_hidden ? id : -1;
}

size_t Vocabulary::longest() const {
    size_t most = 0;
    for (size_t id = 0; id < size(); id++) {
        const std::string_view text = this->text(static_cast<int32_t>(id));
        const auto inner = std::count_if(text.begin(), text.end(), is_continuation);
        most = std::max(most, text.size() - static_cast<size_t>(inner));
    }
    return most;
}

}  // namespace pelton
